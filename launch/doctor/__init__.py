"""`kway doctor`: checks whether this machine can run training, and suggests fixes."""
