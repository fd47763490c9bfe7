"""The command line of the experiments: a file a subject."""
