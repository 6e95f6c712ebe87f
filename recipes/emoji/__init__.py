"""Makes models/emoji-64 and models/emoji-clip from openly licensed emoji: make.sh runs all steps."""
