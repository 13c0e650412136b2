"""A Google Cloud Storage for tests, on this machine: an emulator, a guard in front of it, and fake credentials."""
