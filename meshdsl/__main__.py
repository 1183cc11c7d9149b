"""`python -m meshdsl train ...` is the same as the installed script, `meshdsl train ...`."""

from meshdsl.cli.main import console

if __name__ == "__main__":  # processes that read data import this file again
    raise SystemExit(console())
