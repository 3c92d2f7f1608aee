"""What an update reports besides its loss."""
