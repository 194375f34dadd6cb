"""The class list of a data set or a model, in columns that processes share."""
