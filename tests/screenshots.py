"""Take pictures of a report's page in four media, to look at and to compare.

python -m tests.screenshots PAGE.html NAME    writes docs/pictures/report/NAME-{1280,390,dark,print}.png
"""

from __future__ import annotations

import base64
import sys
import tempfile
from pathlib import Path

from tests.chromium import Browser, open_browser

PICTURES = Path("docs/pictures/report")
MEDIA: dict[str, tuple[int, bool, str]] = {
    "1280": (1280, False, "screen"),
    "390": (390, False, "screen"),
    "dark": (1280, True, "screen"),
    "print": (794, False, "print"),
}
"""Width in pixels, whether it is dark, and the medium. 794 pixels are A4."""
TALLEST = 3000


def main(page: Path, name: str) -> None:
    """Open the page in each medium and write a picture."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as profile, open_browser(Path(profile)) as browser:
        for medium, (width, dark, media) in MEDIA.items():
            browser.open(page, width=width, dark=dark)
            if media == "print":
                browser.call("Emulation.setEmulatedMedia", media=media)
            (PICTURES / f"{name}-{medium}.png").write_bytes(_picture(browser, width))


def _picture(browser: Browser, width: int) -> bytes:
    """Return the beginning of the page as PNG."""
    height = min(browser.evaluate("document.documentElement.scrollHeight"), TALLEST)
    clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 0.75}
    shot = browser.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
    return base64.b64decode(shot["data"])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
