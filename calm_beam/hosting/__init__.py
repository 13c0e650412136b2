"""A model that answers for others: what it is asked, and the host that holds it. Needs no Beam; hosts need JAX."""
