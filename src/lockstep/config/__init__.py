"""What a user may set: typed, with its TOML form, checked before anything starts. Imports without torch."""
