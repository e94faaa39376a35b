from topr_trl.cli import console

if __name__ == "__main__":
    console()
