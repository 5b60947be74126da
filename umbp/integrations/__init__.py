"""What engines load: each module imports its engine, and says what it needs where that is not there."""
