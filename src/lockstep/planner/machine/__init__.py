"""The machine that is planned for."""
