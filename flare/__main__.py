"""The start of the `flare` script, and of `python -m flare`."""

import sys


def main() -> None:
    """Run the command line; a Ctrl-C while its modules are still being read is no traceback either."""
    try:
        from flare.cli.main import main as run
    except KeyboardInterrupt:
        sys.stderr.write("flare: interrupted.\n")
        raise SystemExit(130) from None
    run()


if __name__ == "__main__":
    main()
