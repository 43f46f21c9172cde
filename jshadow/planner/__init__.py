"""What a state and a GPU will hold, counted before anything runs."""
