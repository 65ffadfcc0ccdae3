"""What everything else stands on; it imports nothing else of this package."""
