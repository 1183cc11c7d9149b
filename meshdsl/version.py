"""The version of the package; setup.py reads it here."""

VERSION = "0.1.0"


def version_line() -> str:
    """Returns the versions that a bug report should have."""
    import platform
    from importlib import metadata

    try:
        jax = f"jax {metadata.version('jax')}"
    except metadata.PackageNotFoundError:
        jax = "no jax"
    return f"meshdsl {VERSION} ({jax}, Python {platform.python_version()})"
