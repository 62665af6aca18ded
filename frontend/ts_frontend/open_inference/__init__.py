"""What the Open Inference Protocol means here, whatever transport a request came by."""
