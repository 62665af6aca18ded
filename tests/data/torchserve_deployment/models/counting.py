"""Counts the words of a text, and the words of all texts in a metric."""


def handle(data, context):
    if data is None:
        return None
    counts = [len(bytes(row.get("data") or row.get("body")).split()) for row in data]
    context.metrics.add_counter("WordsCounted", sum(counts))
    return counts
