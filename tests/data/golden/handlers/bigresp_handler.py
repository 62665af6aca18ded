import time


def handle(data, context):
    if data is None:
        return None
    out = []
    for r in data:
        b = r.get("body") or r.get("data")
        b = b.decode() if isinstance(b, (bytes, bytearray)) else str(b)
        if b.startswith("big"):
            out.append("x" * int(b[3:]))
        elif b.startswith("sleep"):
            time.sleep(float(b[5:]))
            out.append(f"{len(data)} rows")
        elif b == "bad":
            raise ValueError("one bad row")
        else:
            out.append(f"{len(data)} rows")
    return out
