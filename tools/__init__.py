"""Tools of the developers; none of it is installed."""
