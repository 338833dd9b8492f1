"""``python -m eagle3compat``."""

from eagle3compat.cli import main

if __name__ == "__main__":
    main()
