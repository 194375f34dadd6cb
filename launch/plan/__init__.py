"""`kway plan`: memory, traffic and step time of a recipe on a cluster that need not exist."""
