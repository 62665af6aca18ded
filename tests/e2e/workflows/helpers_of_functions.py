"""What comes into the archive by --extra-files."""


def mark(name, value):
    text = value if isinstance(value, str) else bytes(value).decode()
    return f"{name}({text})"
