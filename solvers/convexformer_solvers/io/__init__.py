"""Files: arrays with a header, and paths that can be resumed."""
