"""Images and sounds, read within limits: with Pillow (foreword[images]), soundfile and soxr (foreword[speech])."""

from foreword.media.images import Image
from foreword.media.limits import MediaLimits
from foreword.media.parts import take_media
from foreword.media.sounds import Sound

__all__ = ["Image", "MediaLimits", "Sound", "take_media"]
