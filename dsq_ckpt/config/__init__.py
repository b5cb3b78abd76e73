"""The configuration: its schema, search spaces, and the published systems as configurations."""
