"""Bytes of a rank and seconds of a step."""
