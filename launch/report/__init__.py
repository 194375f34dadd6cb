"""`kway report`: a page that compares runs with plots and tables."""
