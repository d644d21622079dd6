"""The commands."""


def main() -> None: ...
