"""Models of users in the bundled trainer: a class of a file or of an installed package (``train.model``)."""
