"""From openly licensed emoji to models/emoji-64 and models/emoji-clip: make.sh runs all steps."""
