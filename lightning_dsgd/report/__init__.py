"""What people look at: pictures of plans."""
