"""Sources of archives: the model store, web servers, S3."""
