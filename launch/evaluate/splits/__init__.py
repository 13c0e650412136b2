"""`calm-beam evaluate --experiment=splits`: calibrating on random splits again and again."""
