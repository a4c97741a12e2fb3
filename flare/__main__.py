"""`python -m flare`: the same program as the `flare` script."""

from flare.cli.main import main

if __name__ == "__main__":
    main()
