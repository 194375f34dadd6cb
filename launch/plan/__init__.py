"""`kway plan`: estimates memory, traffic and step time of a recipe, without the cluster."""
