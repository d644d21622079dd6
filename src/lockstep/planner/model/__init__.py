"""The model that is planned for, part by part."""
