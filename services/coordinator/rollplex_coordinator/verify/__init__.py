"""One group of the user's data, computed in several ways by the real services, and compared. Nothing is updated."""
