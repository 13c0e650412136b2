"""Generated pages of the documentation site, such as the reference, and pages from folders other than docs/."""
