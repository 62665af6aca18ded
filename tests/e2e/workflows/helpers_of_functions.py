"""A file that --extra-files adds to the archive."""


def mark(name, value):
    text = value if isinstance(value, str) else bytes(value).decode()
    return f"{name}({text})"
