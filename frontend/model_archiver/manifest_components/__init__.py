"""What stands in an archive's manifest, under TorchServe's names."""
