"""Presets: complete settings of a run, a TOML file each. The first line is its command, the second what it shows."""

from importlib import resources


def presets() -> dict[str, str]:
    """Name -> text of the presets."""
    files = (f for f in resources.files(__name__).iterdir() if f.name.endswith(".toml"))
    return dict(sorted((f.name.removesuffix(".toml"), f.read_text()) for f in files))


def about(text: str) -> str:
    """What the second line of a preset says of it."""
    return text.splitlines()[1].lstrip("# ")
