"""What people look at after a run: tables on the terminal, pictures, and HTML pages that need nothing beside them."""
