"""Configuration: each setting declared once, read from YAML with file and line, compared, kept."""
