"""Images of messages: every source, and every kind of hostile one, which is an error with its field."""

import base64
import struct
import threading
import zlib
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import BytesIO

import pytest

pillow = pytest.importorskip("PIL.Image", reason="needs the extra foreword[images]")

import numpy as np

from foreword.errors import RequestError
from foreword.media import MediaLimits, take_media

PIXELS = np.random.default_rng(0).integers(0, 256, (12, 9, 3), dtype=np.uint8)


def file_of(picture=None, kind="PNG", **options):
    file = BytesIO()
    (picture or pillow.fromarray(PIXELS)).save(file, kind, **options)
    return file.getvalue()


def url_of(data):
    return "data:image/png;base64," + base64.b64encode(data).decode()


def read(source, **limits):
    """The one image of a message that has a text before it."""
    part = {"type": "image", "image": source}
    content = [{"type": "text", "text": "see"}, part]
    messages, [image] = take_media([{"role": "user", "content": content}], MediaLimits(**limits))
    assert messages == [{"role": "user", "content": [content[0], {"type": "image"}]}]
    assert image.field == "messages[0].content[1]"
    return image


def png_header(width, height):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"\0" * 10**6)) + chunk(b"IEND", b"")


def test_an_image_is_the_same_from_every_source(tmp_path):
    data = file_of()
    path = tmp_path / "one.png"
    path.write_bytes(data)
    images = [read(source) for source in (data, bytearray(data), url_of(data), path, str(path), f"file://{path}",
                                          pillow.fromarray(PIXELS), file_of(kind="BMP"))]  # fmt: skip
    assert all((np.asarray(image.pixels) == PIXELS).all() for image in images)
    assert len({image.digest for image in images}) == 1
    assert read(file_of(pillow.fromarray(PIXELS[:, ::-1]))).digest != images[0].digest


def test_parts_of_openai_have_their_image_in_an_object():
    for value in ({"url": url_of(file_of())}, url_of(file_of())):
        for kind in ("image_url", "input_image"):
            _, [image] = take_media([{"role": "user", "content": [{"type": kind, "image_url": value}]}], MediaLimits())
            assert image.pixels.size == (9, 12)


def test_modes_are_rgb_and_photographs_stand_upright():
    grey = pillow.fromarray(PIXELS[:, :, 0])
    assert read(file_of(grey)).pixels.mode == "RGB"
    exif = pillow.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    assert read(file_of(kind="JPEG", exif=exif)).pixels.size == (12, 9)


def test_values_of_16_bits_become_the_nearest_of_8_and_those_of_32_are_refused():
    levels = np.array([[0, 128, 129, 257], [32767, 32768, 65406, 65407], [65535, 5140, 1, 65534]], np.uint16)
    wide = pillow.fromarray(levels)
    expected = np.round(levels / 257)[..., None].repeat(3, 2)
    turned = pillow.Exif()
    turned[0x0112] = 6
    assert wide.mode == "I;16"
    for source in (wide, file_of(wide), file_of(wide, "TIFF"), pillow.fromarray(levels.astype(">u2"))):
        np.testing.assert_array_equal(np.asarray(read(source).pixels), expected)
    np.testing.assert_array_equal(np.asarray(read(file_of(wide, "TIFF", exif=turned)).pixels), np.rot90(expected, -1))
    for kind, mode in ((np.int32, "I"), (np.float32, "F")):
        picture = pillow.fromarray(levels.astype(kind))
        for source in (picture, file_of(picture, "TIFF")):
            with pytest.raises(RequestError, match=rf"4 × 3 pixels of 32 bits \(mode {mode}\).*Convert it"):
                read(source)


def test_values_of_12_bits_of_a_tiff_file_become_the_nearest_of_8():
    levels = np.array([[0, 1, 8, 9], [2047, 2048, 4094, 4095]], np.uint32)
    packed = b"".join(
        int(a << 12 | b).to_bytes(3, "big") for a, b in levels.reshape(-1, 2).tolist()
    )  # two values in three bytes
    entries = [(256, 4), (257, 2), (258, 12), (259, 1), (262, 1), (273, 8 + 2 + 9 * 12 + 4), (277, 1), (278, 2)]
    entries.append((279, len(packed)))
    file = struct.pack("<2sHIH", b"II", 42, 8, len(entries))
    file += b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in entries) + bytes(4) + packed
    expected = np.round(levels * (255 / 4095))[..., None].repeat(3, 2)
    np.testing.assert_array_equal(np.asarray(read(file).pixels), expected)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (b"", "0 bytes.*is empty"),
        ("data:;base64,", "0 bytes.*is empty"),
        (b"GIF89a", "is not an image"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is not an image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is not an image"),
        (file_of()[:-60], "is damaged"),
        (file_of(kind="JPEG")[:200], "is (damaged|not an image)"),
        (png_header(30000, 30000), "may have 1 to"),
        (png_header(60000, 60000), "may have 1 to"),
        (png_header(0, 5), "(may have 1 to|is not an image)"),
        (b"\x89PNG\r\n\x1a\n" + b"\xff" * 100, "is not an image"),
        ("data:image/png;base64,@@@", "is not base64"),
        ("data:image/png,abc", "is not a data: URL"),
        ("data:", "is not a data: URL"),
        ("http://example.com/a.png", "not fetched from other machines"),
        ("ftp://example.com/a.png", "file not found"),
        ("/does/not/exist.png", "file not found"),
        ("/tmp", "file not found"),
        ("a\0b", "file not found"),
        ("x" * 100_000, "(file not found|cannot be read)"),
        (5, "is not a file"),
        ([1, 2], "is not a file"),
        (None, "has no image"),
    ],
)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_what_is_no_image_is_an_error_with_its_field(source, reason):
    with pytest.raises(RequestError, match=reason) as found:
        read(source)
    assert found.value.field == "messages[0].content[1]"
    assert " object at 0x" not in str(found.value)


def test_limits():
    data = file_of()
    for limits, reason in (
        ({"max_bytes": len(data) - 1}, f"may have {len(data) - 1}"),
        ({"max_pixels": 9 * 12 - 1}, "may have 1 to 107 pixels"),
        ({"max_images": 0}, "may have 0 parts"),
    ):
        for source in (data, url_of(data)):
            with pytest.raises(RequestError, match=reason):
                read(source, **limits)
    for size in ((1, 201), (201, 1)):
        with pytest.raises(RequestError, match="200 times as long"):
            read(pillow.new("RGB", size))
    with pytest.raises(RequestError, match="9 × 12 pixels"):
        read(pillow.fromarray(PIXELS), max_pixels=50)
    assert read(data, max_bytes=len(data), max_pixels=9 * 12, max_images=1)


def test_files_of_this_machine_are_read_only_if_allowed(tmp_path):
    path = tmp_path / "one.png"
    path.write_bytes(file_of())
    for source in (path, str(path), f"file://{path}"):
        with pytest.raises(RequestError, match="files of this machine are not read"):
            read(source, local_files=False)


def test_messages_without_images_stay_as_they_are():
    messages = [{"role": "user", "content": "a"}, "no message", {"role": "user", "content": [5, {"type": "text"}]}]
    assert take_media(messages, MediaLimits()) == (messages, [])


class Host(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/elsewhere":
            self.send_response(302)
            self.send_header("Location", "http://example.com/one.png")
            self.end_headers()
            return
        self.send_response(404 if self.path == "/missing" else 200)
        if self.path == "/long-head":
            self.send_header("X", "a" * 100_000)
        if self.path == "/slow-head":
            for _ in range(50):
                self.send_header("X", "a")
                self.flush_headers()
                threading.Event().wait(0.02)
        self.end_headers()
        if self.path == "/slow":
            for _ in range(50):
                self.wfile.write(b"x")
                threading.Event().wait(0.02)
        elif self.path == "/endless":
            self.wfile.write(b"x" * 10_000)
        else:
            self.wfile.write(file_of())

    def log_message(self, *_):
        pass


@pytest.fixture
def host():
    with HTTPServer(("127.0.0.1", 0), Host) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_images_are_fetched_from_allowed_hosts_within_size_and_time(host):
    place = host.removeprefix("http://")
    allowed = {"remote_hosts": ("example.com:443", place)}
    assert read(f"{host}/one.png", **allowed).pixels.size == (9, 12)
    for path, limits, reason in (
        ("/one.png", {"remote_hosts": ("example.com",)}, "from example.com only"),
        ("/one.png", {"remote_hosts": ("127.0.0.1",)}, "from 127.0.0.1 only"),  # at port 80
        ("/elsewhere", allowed, f"from example.com:443, {place} only"),
        ("/missing", allowed, "cannot be fetched"),
        ("/endless", {**allowed, "max_bytes": 5000}, "may have 5000"),
        ("/long-head", allowed, "cannot be fetched"),
        ("/slow", {**allowed, "timeout": 0.1}, "cannot be fetched.*longer than 0.1 s"),
        ("/slow-head", {**allowed, "timeout": 0.1}, "cannot be fetched.*longer than 0.1 s"),
    ):
        with pytest.raises(RequestError, match=reason):
            read(host + path, **limits)
