"""`kway plan`: estimates memory, traffic and step time of a recipe without using the cluster."""
