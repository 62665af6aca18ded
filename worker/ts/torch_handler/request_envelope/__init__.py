"""Envelopes: the formats that clients of other systems wrap around a model's inputs and outputs. Chosen by
`service_envelope`; a module's first class is the envelope."""
