"""Images of conversations: found in messages, read within limits. Needs Pillow (``foreword[vision]``)."""

from foreword.media.images import Image
from foreword.media.limits import MediaLimits
from foreword.media.parts import take_images

__all__ = ["Image", "MediaLimits", "take_images"]
