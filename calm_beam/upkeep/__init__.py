"""Looking after a promise once it is given: on fresh data (`verification`), and while it serves (`monitor`)."""
