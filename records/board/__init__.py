"""What people look at: the board's tables, the site of pages and the pictures of the README."""
