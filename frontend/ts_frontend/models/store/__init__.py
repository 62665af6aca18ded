"""Where archives come from: the model store, web servers, S3."""
