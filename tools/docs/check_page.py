"""Look at a plan's page in a real browser, without a display: draws it, and fails if it is dark or blank.

    replicax plan examples/digits.py --topology v5e:4x4 --html plan.html
    python tools/docs/check_page.py plan.html plan.png

Needs Chromium, as ``chromium`` or as named in the environment variable ``BROWSER``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.image
import numpy as np

QUIET = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --force-device-scale-factor=1"
)


def main() -> None:
    page, picture = (Path(argument).resolve() for argument in sys.argv[1:3])
    with tempfile.TemporaryDirectory() as profile:
        command = [
            os.environ.get("BROWSER", "chromium"),
            *QUIET.split(),
            f"--user-data-dir={profile}",
            "--host-resolver-rules=MAP * ~NOTFOUND",  # nothing from outside can come
            "--window-size=1280,5200",
            f"--screenshot={picture}",
            page.as_uri(),
        ]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL, timeout=120)
    pixels = matplotlib.image.imread(picture)[..., :3]
    written = np.flatnonzero(pixels.min(axis=(1, 2)) < 1)
    pixels = pixels[: written[-1] + 30 if len(written) else 1]  # without the empty end
    matplotlib.image.imsave(picture, pixels)
    if pixels.mean() < 0.8 or pixels.std() < 0.05:
        sys.exit(f"the page is dark or blank: mean {pixels.mean():.2f}, deviation {pixels.std():.2f}")
    print(f"{picture.name}: {pixels.shape[1]} × {pixels.shape[0]} pixels, drawn without a network")


if __name__ == "__main__":
    main()
