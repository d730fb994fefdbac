"""``python -m replicax``, and the command ``replicax``."""

import sys


def main() -> int:
    """Run a command; see :func:`replicax.cli.main`."""
    try:
        from replicax.cli import main as run
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return run()


if __name__ == "__main__":
    sys.exit(main())
