"""Put masks into a model that already exists, and train it on."""
