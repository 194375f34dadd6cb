"""`kway plan`: estimates a recipe's memory, traffic and step time without access to the cluster."""
